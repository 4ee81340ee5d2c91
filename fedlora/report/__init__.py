"""Run report, plots and trackers."""
