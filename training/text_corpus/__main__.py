from training.text_corpus.command import main

if __name__ == "__main__":
    main()
