"""Agents as they ship. They reach the model through an ordinary OpenAI client and know nothing of training."""
