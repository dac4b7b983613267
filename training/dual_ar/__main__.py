from training.dual_ar.command import main

if __name__ == "__main__":
    main()
