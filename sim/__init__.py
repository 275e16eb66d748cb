"""What-ifs: a log once more in modelled time (`world`), what operations cost (`costs`), prefix blocks (`blocks`)."""
