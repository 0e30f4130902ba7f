"""`rowhaul demo --live`: events, a trainer that learns from them, a server, its page and a client."""
