"""What runners are in the middle of, saved and given to others."""
