"""Teacher speech from Kokoro-82M: fetch and convert the model, phonemize text, speak it in large batches on a GPU.

    python -m training.kokoro.fetch build/kokoro/packages
    python -m training.kokoro.convert build/kokoro/packages build/kokoro/model
    python -m zipfile -e build/kokoro/packages/hibari_tts-0.2.1-py3-none-any.whl build/kokoro/hibari
    python -m training.kokoro.phonemize sentences.txt us.jsonl.gz --accent us --hibari build/kokoro/hibari
    python -m training.kokoro.produce --model build/kokoro/model --utterances us.jsonl.gz gb.jsonl.gz --out build/speech

`produce` writes shards as `training.data` does (`.pcm`, `.jsonl`), at 24 kHz, and beside them `.phonemes`: the token id
of the phoneme spoken in each 25 ms, one byte each.
"""
