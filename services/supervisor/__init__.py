"""Several processes as one stack: started, watched, started again."""
