/* SVOX Pico as a teacher: `pico DATA_DIR`, where DATA_DIR holds en-US_*.bin and en-GB_*.bin. Voices: us, gb. */
#include "protocol.h"

#include "picoapi.h"
#include "picodefs.h"

#define MEMORY_BYTES 2500000
#define MAX_SAMPLES (SAMPLE_RATE * 60)
#define VOICE_NAME ((const pico_Char *)"teacher")

typedef struct {
    const char *name;
    const char *analysis;
    const char *signal;
    pico_System system;
    pico_Engine engine;
} voice;

static voice voices[] = {
    {"us", "en-US_ta.bin", "en-US_lh0_sg.bin", NULL, NULL},
    {"gb", "en-GB_ta.bin", "en-GB_kh0_sg.bin", NULL, NULL},
};

static void require(pico_Status status, const char *what)
{
    if (status != PICO_OK) {
        fprintf(stderr, "pico: %s failed with status %d\n", what, (int)status);
        exit(1);
    }
}

static void add_resource(voice *v, const char *folder, const char *file)
{
    char path[1024];
    char name[PICO_RETSTRINGSIZE];
    pico_Resource resource = NULL;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    require(pico_loadResource(v->system, (const pico_Char *)path, &resource), path);
    require(pico_getResourceName(v->system, resource, name), "resource name");
    require(pico_addResourceToVoiceDefinition(v->system, VOICE_NAME, (const pico_Char *)name), "voice definition");
}

/* A system holds at most one engine, so each voice gets a system of its own. */
static void open_voice(voice *v, const char *folder)
{
    require(pico_initialize(calloc(MEMORY_BYTES, 1), MEMORY_BYTES, &v->system), "initialise");
    require(pico_createVoiceDefinition(v->system, VOICE_NAME), "create voice");
    add_resource(v, folder, v->analysis);
    add_resource(v, folder, v->signal);
    require(pico_newEngine(v->system, VOICE_NAME, &v->engine), "new engine");
}

static voice *find_voice(const char *name, const char *folder)
{
    for (size_t i = 0; i < sizeof voices / sizeof *voices; i++) {
        if (strcmp(voices[i].name, name) == 0) {
            if (!voices[i].engine) {
                open_voice(&voices[i], folder);
            }
            return &voices[i];
        }
    }
    fprintf(stderr, "pico: no voice %s\n", name);
    exit(2);
}

/* Samples written, or 0 after a failure or an overflow. */
static uint32_t synthesise(pico_Engine engine, const char *marked_up, int16_t *out)
{
    const char *text = marked_up;
    int left = (int)strlen(marked_up) + 1; /* the closing NUL tells Pico to flush */
    size_t used = 0;
    while (left > 0) {
        pico_Int16 taken = 0, received = 0, kind = 0;
        pico_Status status;
        if (pico_putTextUtf8(engine, (const pico_Char *)text, (pico_Int16)left, &taken) != PICO_OK) {
            return 0;
        }
        text += taken;
        left -= taken;
        do {
            char buffer[1024];
            status = pico_getData(engine, buffer, sizeof buffer, &received, &kind);
            if (used + (size_t)received > MAX_SAMPLES * sizeof *out) {
                return 0;
            }
            memcpy((char *)out + used, buffer, (size_t)received);
            used += (size_t)received;
        } while (status == PICO_STEP_BUSY);
        if (status != PICO_STEP_IDLE) {
            return 0;
        }
    }
    return (uint32_t)(used / sizeof *out);
}

int main(int argc, char **argv)
{
    static char line[MAX_LINE], marked_up[MAX_LINE + 128];
    static int16_t samples[MAX_SAMPLES];
    request asked;
    if (argc != 2) {
        fprintf(stderr, "usage: pico DATA_DIR\n");
        return 2;
    }
    while (read_request(line, &asked)) {
        voice *v = find_voice(asked.voice, argv[1]);
        snprintf(marked_up, sizeof marked_up,
                 "<speed level='%d'><pitch level='%d'><volume level='%d'>%s</volume></pitch></speed>", asked.speed,
                 asked.pitch, asked.volume, asked.text);
        uint32_t count = synthesise(v->engine, marked_up, samples);
        if (count == 0) {
            fprintf(stderr, "pico: cannot speak: %s\n", asked.text);
        }
        /* Neither a failed sentence nor an unclosed markup may reach into the next one. */
        require(pico_resetEngine(v->engine, PICO_RESET_SOFT), "reset");
        write_samples(samples, count);
    }
    return 0;
}
