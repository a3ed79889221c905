"""Plain data as people want to see it: one grid, shown in a terminal by the CLI and as HTML by notebooks."""
