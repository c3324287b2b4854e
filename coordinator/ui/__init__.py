"""Web page: static files, sign-in and live updates."""
