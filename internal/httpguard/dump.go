package httpguard

import (
	"bufio"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sync/semaphore"
)

const (
	// stallTime is how long a client may read nothing of a dump. dumpTime is how long the whole dump may take.
	stallTime = 5 * time.Second
	dumpTime  = time.Minute
	// dumpBuffer is how much of a dump is in memory, besides what the kernel holds.
	dumpBuffer = 16 << 10
)

// Dumps bounds how many clients read dumps at a time. A dump is a long response that is written part by part, so a
// longer dump does not take more memory.
type Dumps struct {
	slots   *semaphore.Weighted
	max     int64
	content string
}

// NewDumps returns a Dumps for up to limit clients at a time. content describes what the clients read; it is a part
// of the text of a refusal.
func NewDumps(limit int64, content string) *Dumps {
	return &Dumps{slots: semaphore.NewWeighted(limit), max: limit, content: content}
}

// Limited returns a handler that calls next. While as many requests are answered as the limit of [NewDumps] allows, it
// refuses further requests.
func (d *Dumps) Limited(next func(w *Dump, r *http.Request)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !d.slots.TryAcquire(1) {
			w.Header().Set("Retry-After", strconv.Itoa(int(stallTime.Seconds())))
			http.Error(w, fmt.Sprintf("%d clients read %s already, which is the limit: try again", d.max, d.content), http.StatusServiceUnavailable)
			return
		}
		defer d.slots.Release(1)
		out := &Dump{response: w, control: http.NewResponseController(w), end: time.Now().Add(dumpTime)}
		out.buffer = bufio.NewWriterSize((*progress)(out), dumpBuffer)
		next(out, r)
		_ = out.buffer.Flush() // fails only if the client does not read or has disconnected
	}
}

// A Dump is one response, written part by part.
type Dump struct {
	response http.ResponseWriter
	control  *http.ResponseController
	end      time.Time // when the client must have read all of it
	buffer   *bufio.Writer
}

// Header returns the header of the response.
func (d *Dump) Header() http.Header { return d.response.Header() }

// WriteHeader sends the status of the response, before its first part.
func (d *Dump) WriteHeader(status int) { d.response.WriteHeader(status) }

// Write writes a part of the response. If the client does not read, Write panics with [http.ErrAbortHandler], which
// ends the connection. Write never returns an error.
func (d *Dump) Write(part []byte) (int, error) {
	n, err := d.buffer.Write(part)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return n, nil
}

// A progress writes to the client of a dump. The client has to read a part of the dump within each stallTime.
type progress Dump

// Write implements [io.Writer].
func (p *progress) Write(b []byte) (int, error) {
	deadline := time.Now().Add(stallTime)
	if deadline.After(p.end) {
		deadline = p.end
	}
	if err := p.control.SetWriteDeadline(deadline); err != nil {
		return 0, err
	}
	return p.response.Write(b)
}
