"""RLModules of the joint trainer, and the action distributions they use."""
