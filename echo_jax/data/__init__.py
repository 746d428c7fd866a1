"""Records, the stages that process them, and the pipeline that runs the stages."""
