"""`/v1/responses`: OpenAI's Responses API, without a store, over the chat of this server."""
