"""What several jobs have in common: state, streams as targets, dead letters, refusals, tables in versions and tables to look up in."""
