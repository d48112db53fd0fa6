"""The recommendation for people: a page for a browser, and a screen of text."""
