"""What stands between an environment and a module: encoding of observations and actions, normalisation."""
