"""Files of jobs and their input data: where they are, and how they get to the nodes."""
