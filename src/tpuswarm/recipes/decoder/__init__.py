"""Today's language models: Llama, Mistral, Qwen, Gemma, SmolLM and OLMo, as one decoder."""
