#!/bin/sh -e
# Stream audio while it is generated, with curl: stream.sh [ADDRESS] > tide.wav
curl -sSfN "${1:-http://localhost:8080}/v1/tts" -H "Content-Type: application/json" \
    ${SHOAL_KEY:+-H "Authorization: Bearer $SHOAL_KEY"} \
    -d '{"text": "The tide is coming in.", "format": "wav", "streaming": true}'
