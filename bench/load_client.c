// A light HTTP load generator: one thread, epoll, requests prepared beforehand. Used by serve.py and serve_load.py.
//
//   load_client PORT REQUESTS CONNECTIONS SECONDS RATE TIMEOUT_S OUTPUT
//
// REQUESTS: a file of (uint32 length, bytes) records, each a whole HTTP/1.1 request for a kept-alive connection; they
// are sent in turn. RATE 0 is a closed loop: each connection sends its next request when it has its answer. Else RATE
// requests a second are due, each taken by an idle connection; its latency counts from when it was due.
// OUTPUT: a record per request: double due_s, float latency_s, uint16 status, uint16 flags. Status 0: no answer came
// (flags 1: connection closed, 2: no answer within TIMEOUT_S, 4: it could not connect).
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int fd, busy, status;
    long body_left;  // -1: the header is not complete
    size_t sent, header_length;
    const char *request;
    size_t request_length;
    double due, started;
    char header[16384];
} Connection;

typedef struct __attribute__((packed)) {
    double due;
    float latency;
    uint16_t status, flags;
} Record;

static struct sockaddr_in address;
static int poller;
static FILE *output;
static char **requests;
static uint32_t *lengths;
static size_t count, next_request;
static double began;
static long recorded;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void record(Connection *c, int status, int flags) {
    Record r = {c->due - began, (float)(now() - c->due), (uint16_t)status, (uint16_t)flags};
    fwrite(&r, sizeof r, 1, output);
    recorded++;
    c->busy = 0;
}

static void disconnect(Connection *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static int open_connection(Connection *c) {
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) {
        disconnect(c);
        return -1;
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
    return 0;
}

static void fail(Connection *c, int flags) {
    if (c->busy) record(c, 0, flags);
    disconnect(c);
}

static void push(Connection *c) {
    while (c->sent < c->request_length) {
        ssize_t n = send(c->fd, c->request + c->sent, c->request_length - c->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {  // rare: requests are smaller than a socket's buffer
            struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
            epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
            return;
        }
        if (n <= 0) { fail(c, 1); return; }
        c->sent += n;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static void start(Connection *c, double due) {
    c->busy = 1;
    c->due = due;
    c->started = now();
    c->request = requests[next_request % count];
    c->request_length = lengths[next_request % count];
    next_request++;
    c->sent = c->header_length = 0;
    c->body_left = -1;
    if (c->fd < 0 && open_connection(c)) { record(c, 0, 4); return; }
    push(c);
}

// Takes what has come; 1 when the answer is complete, -1 when the connection is of no more use.
static int pull(Connection *c) {
    static char buffer[1 << 18];
    for (;;) {
        ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
        if (n < 0 && errno == EAGAIN) return 0;
        if (n <= 0) return -1;
        char *at = buffer;
        if (!c->busy) return -1;  // bytes that nobody asked for
        if (c->body_left < 0) {
            size_t before = c->header_length;
            size_t take = (size_t)n < sizeof c->header - 1 - before ? (size_t)n : sizeof c->header - 1 - before;
            memcpy(c->header + before, at, take);
            c->header_length += take;
            c->header[c->header_length] = 0;
            char *end = strstr(c->header, "\r\n\r\n");
            if (!end) {
                if (c->header_length == sizeof c->header - 1) return -1;
                continue;
            }
            c->status = atoi(c->header + 9);
            char *length = strcasestr(c->header, "\r\ncontent-length:");
            if (!length || length > end) return -1;  // chunked answers are not understood
            c->body_left = atol(length + 17);
            size_t used = (end + 4 - c->header) - before;
            at += used;
            n -= used;
        }
        c->body_left -= n;
        if (c->body_left == 0) return 1;
        if (c->body_left < 0) return -1;
    }
}

int main(int argc, char **argv) {
    if (argc != 8) { fprintf(stderr, "usage: load_client PORT REQUESTS CONNECTIONS SECONDS RATE TIMEOUT_S OUTPUT\n"); return 2; }
    int connections = atoi(argv[3]);
    double seconds = atof(argv[4]), rate = atof(argv[5]), timeout = atof(argv[6]);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)atoi(argv[1]));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    FILE *input = fopen(argv[2], "rb");
    output = fopen(argv[7], "wb");
    if (!input || !output) { perror("load_client"); return 2; }
    uint32_t length;
    while (fread(&length, 4, 1, input) == 1) {
        requests = realloc(requests, (count + 1) * sizeof *requests);
        lengths = realloc(lengths, (count + 1) * sizeof *lengths);
        requests[count] = malloc(length);
        lengths[count] = length;
        if (fread(requests[count], 1, length, input) != length) { fprintf(stderr, "a request is cut\n"); return 2; }
        count++;
    }
    poller = epoll_create1(0);
    Connection *all = calloc(connections, sizeof *all);
    for (int i = 0; i < connections; i++) all[i].fd = -1;
    for (int i = 0; i < connections; i++)
        if (open_connection(&all[i])) { perror("load_client: connect"); return 1; }
    began = now();
    long due_count = 0;
    int ending = 0, none_free = 0;
    double checked = began;
    if (rate == 0)
        for (int i = 0; i < connections; i++) start(&all[i], now());
    for (;;) {
        struct epoll_event events[256];
        int wait_ms = 100;
        if (rate > 0 && !ending && !none_free) {  // none free: nothing can be sent before an answer comes
            double left = began + due_count / rate - now();
            wait_ms = left <= 0 ? 0 : (int)(left * 1000) + (left * 1000 < 1 ? 1 : 0);
            if (wait_ms > 100) wait_ms = 100;
        }
        int found = epoll_wait(poller, events, 256, wait_ms);
        for (int i = 0; i < found; i++) {
            Connection *c = events[i].data.ptr;
            if (c->fd < 0) continue;
            if (events[i].events & EPOLLOUT) push(c);
            if (c->fd < 0 || !(events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) continue;
            int done = pull(c);
            if (done < 0) fail(c, 1);
            else if (done > 0) record(c, c->status, 0);
            if (done && rate == 0 && !ending) start(c, now());
        }
        double moment = now();
        if (moment - began >= seconds) ending = 1;
        if (rate > 0 && !ending) {
            int place = 0;
            none_free = 0;
            while (began + due_count / rate <= moment) {
                while (place < connections && all[place].busy) place++;
                if ((none_free = place == connections)) break;  // all wait: what is due waits, too, and its clock runs
                start(&all[place], began + due_count / rate);
                due_count++;
            }
        }
        if (moment - checked > 0.25 || ending) {
            checked = moment;
            int busy = 0;
            for (int i = 0; i < connections; i++) {
                if (all[i].busy && moment - all[i].started > timeout) fail(&all[i], 2);
                busy += all[i].busy;
            }
            if (ending && !busy) break;
        }
    }
    fclose(output);
    double took = now() - began;
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    printf("{\"requests\": %ld, \"seconds\": %.6f, \"cpu_s\": %.6f}\n", recorded, took, cpu.tv_sec + cpu.tv_nsec * 1e-9);
    return 0;
}
