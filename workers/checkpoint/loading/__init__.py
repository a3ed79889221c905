"""Load checkpoints verified: into live objects, tensor by tensor, compared with another, or converted."""
