"""Pure decisions and pure state: ranges, layouts, events, the residency fold, plans. No engine, no log, no clock."""
