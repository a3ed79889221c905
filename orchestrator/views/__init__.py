"""Views: types of the responses of the server's REST interface. What they describe is JSON: lists, no tuples."""
