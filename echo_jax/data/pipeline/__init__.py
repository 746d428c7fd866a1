"""The stages of a pipeline, and the engines that run them with an echo."""
