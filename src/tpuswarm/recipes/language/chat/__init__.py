"""Conversations: chat templates, training data, packed rows, answers."""
