"""Output of jobs: read it from the nodes, copy it before a node is removed, and relay commands run beside a job."""
