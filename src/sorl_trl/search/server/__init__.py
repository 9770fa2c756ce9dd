"""Search over HTTP in Search-R1's format: the server, the client, and the messages between them."""
