"""Parts that several routes share: responses, request bodies, streams, and long-running operations."""
