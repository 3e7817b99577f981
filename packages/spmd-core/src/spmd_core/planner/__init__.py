"""Plans: what a training script takes on devices that are not there, by compilation alone."""
