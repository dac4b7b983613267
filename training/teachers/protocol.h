/* The line protocol every teacher speaks.
 *
 * Request, one line on stdin:   VOICE \t SPEED \t PITCH \t VOLUME \t TEXT \n     (percent; 100 is the voice as made)
 * Answer, on stdout:            uint32 sample count, then that many int16 samples, 16 kHz mono, all little-endian
 *
 * A count of zero means the sentence could not be spoken; the reason is on stderr. End of input ends the process,
 * so a teacher never outlives the program that drives it.
 */
#ifndef TEACHER_PROTOCOL_H
#define TEACHER_PROTOCOL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SAMPLE_RATE 16000
#define MAX_LINE 8192

typedef struct {
    char voice[32];
    int speed;
    int pitch;
    int volume;
    const char *text;
} request;

/* 1: a request was read; 0: end of input. A malformed line is a bug in the caller, so it ends the process. */
static int read_request(char *line, request *out)
{
    int text_at = 0;
    if (!fgets(line, MAX_LINE, stdin)) {
        return 0;
    }
    line[strcspn(line, "\r\n")] = '\0';
    if (sscanf(line, "%31[^\t]\t%d\t%d\t%d%n", out->voice, &out->speed, &out->pitch, &out->volume, &text_at) != 4 ||
        line[text_at] != '\t') {
        fprintf(stderr, "malformed request: %s\n", line);
        exit(2);
    }
    out->text = line + text_at + 1;
    return 1;
}

static void write_samples(const int16_t *samples, uint32_t count)
{
    if (fwrite(&count, sizeof count, 1, stdout) != 1 || fwrite(samples, sizeof *samples, count, stdout) != count ||
        fflush(stdout) != 0) {
        exit(3);
    }
}

#endif
