"""Choose a backend: by name, availability, preference or free memory."""
