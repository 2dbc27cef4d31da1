"""The embedded dataset: captioned 64-pixel emojis, composed at load time (see README.md here)."""
