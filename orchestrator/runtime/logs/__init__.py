"""Output of jobs: read it from the nodes, copy it before a node goes, and relay commands run beside a job."""
