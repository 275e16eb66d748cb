"""What-ifs on modelled time. Empty until the simulator lands; the room fixes where it goes."""
