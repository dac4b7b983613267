/* CMU Flite as a teacher. Voices: slt, rms, awb. */
#include "protocol.h"

#include <flite/flite.h>

cst_voice *register_cmu_us_slt(const char *);
cst_voice *register_cmu_us_rms(const char *);
cst_voice *register_cmu_us_awb(const char *);

/* Flite's library refers to its sound card driver, which needs a shared library and which a teacher never calls. With
 * these names taken the linker leaves the driver out, and the program can be static. */
#define NO_SOUND_CARD(name) \
    int name(void) \
    { \
        return -1; \
    }
NO_SOUND_CARD(audio_open_alsa)
NO_SOUND_CARD(audio_close_alsa)
NO_SOUND_CARD(audio_write_alsa)
NO_SOUND_CARD(audio_flush_alsa)
NO_SOUND_CARD(audio_drain_alsa)

typedef struct {
    const char *name;
    cst_voice *(*open)(const char *);
    cst_voice *opened;
} voice;

static voice voices[] = {
    {"slt", register_cmu_us_slt, NULL},
    {"rms", register_cmu_us_rms, NULL},
    {"awb", register_cmu_us_awb, NULL},
};

static cst_voice *find_voice(const char *name)
{
    for (size_t i = 0; i < sizeof voices / sizeof *voices; i++) {
        if (strcmp(voices[i].name, name) == 0) {
            if (!voices[i].opened) {
                voices[i].opened = voices[i].open(NULL);
            }
            return voices[i].opened;
        }
    }
    fprintf(stderr, "flite: no voice %s\n", name);
    exit(2);
}

static void scale(cst_wave *wave, int volume)
{
    for (int i = 0; i < wave->num_samples; i++) {
        int sample = wave->samples[i] * volume / 100;
        wave->samples[i] = (short)(sample > 32767 ? 32767 : sample < -32768 ? -32768 : sample);
    }
}

static void speak(const request *asked)
{
    cst_voice *v = find_voice(asked->voice);
    feat_set_float(v->features, "duration_stretch", 100.0f / (float)asked->speed);
    feat_set_float(v->features, "f0_shift", (float)asked->pitch / 100.0f);
    cst_wave *wave = flite_text_to_wave(asked->text, v);
    if (!wave || wave->sample_rate != SAMPLE_RATE || wave->num_channels != 1 || wave->num_samples <= 0) {
        fprintf(stderr, "flite: cannot speak: %s\n", asked->text);
        write_samples(NULL, 0);
    } else {
        if (asked->volume != 100) {
            scale(wave, asked->volume);
        }
        write_samples(wave->samples, (uint32_t)wave->num_samples);
    }
    delete_wave(wave);
}

int main(void)
{
    static char line[MAX_LINE];
    request asked;
    flite_init();
    while (read_request(line, &asked)) {
        speak(&asked);
    }
    return 0;
}
