"""Heads, auxiliary targets and constraints in whole updates and whole algorithms."""
