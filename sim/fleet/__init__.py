"""A fleet's requests over one pool of prefix blocks, in modelled time: block by block, not token by token."""
