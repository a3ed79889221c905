"""The server of a home: its record, token, socket and process, as the server and its clients use them."""
