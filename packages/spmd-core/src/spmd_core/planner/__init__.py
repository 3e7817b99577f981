"""Plans: the memory, communication and time of a script on absent devices, by compilation."""
