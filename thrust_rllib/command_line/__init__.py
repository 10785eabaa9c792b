"""`thrust-rllib train` behind its options: configuration, run folder, loop, views and messages."""
