package httpguard

import (
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
		next(&Dump{w, http.NewResponseController(w), time.Now().Add(dumpTime)}, r)
	}
}

// A Dump is one response, written part by part.
type Dump struct {
	http.ResponseWriter
	control *http.ResponseController
	end     time.Time // when the client must have read all of it
}

// Write writes a part of the response. If the client does not read, Write panics with [http.ErrAbortHandler], which
// ends the connection. Write never returns an error.
func (d *Dump) Write(part []byte) (int, error) {
	deadline := time.Now().Add(stallTime)
	if deadline.After(d.end) {
		deadline = d.end
	}
	err := d.control.SetWriteDeadline(deadline)
	if err == nil {
		_, err = d.ResponseWriter.Write(part)
	}
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return len(part), nil
}
