"""What a report says about runs: their numbers, groups of seeds, figures and the page."""
