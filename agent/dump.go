package agent

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
)

const (
	// maxDumps is how many clients get a dump at a time. A dump keeps a table alive that was
	// replaced meanwhile.
	maxDumps = 2
	// stallTime is how long a client of a dump may take none of it, dumpTime how long all of it
	// may take.
	stallTime = 5 * time.Second
	dumpTime  = time.Minute
	// dumpBuffer is how much of a dump is in memory, besides what the kernel holds.
	dumpBuffer = 16 << 10
)

// dumps are the responses that grow with the table and the cache. They are written entry by
// entry, so that their memory does not grow with them.
type dumps struct{ slots *semaphore.Weighted }

func newDumps() dumps { return dumps{semaphore.NewWeighted(maxDumps)} }

// limited returns a handler that refuses a request while maxDumps others are answered.
func (d dumps) limited(next func(w *dump, r *http.Request)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !d.slots.TryAcquire(1) {
			w.Header().Set("Retry-After", strconv.Itoa(int(stallTime.Seconds())))
			http.Error(w, fmt.Sprintf("%d clients read the table or the cache already, which is the limit: try again", maxDumps), http.StatusServiceUnavailable)
			return
		}
		defer d.slots.Release(1)
		out := &dump{ResponseWriter: w, control: http.NewResponseController(w), end: time.Now().Add(dumpTime)}
		out.buffer = bufio.NewWriterSize((*progress)(out), dumpBuffer)
		next(out, r)
		_ = out.buffer.Flush() // fails only if the client does not read or has disconnected
	}
}

// A dump is one response. Its methods panic with [http.ErrAbortHandler] if the client does not
// read, so that the connection ends.
type dump struct {
	http.ResponseWriter
	control *http.ResponseController
	end     time.Time // the latest
	buffer  *bufio.Writer
	scratch bytes.Buffer // of entry
}

// A progress writes to the client of a dump, which has to take some of it every stallTime.
type progress dump

// Write implements [io.Writer].
func (p *progress) Write(b []byte) (int, error) {
	deadline := time.Now().Add(stallTime)
	if deadline.After(p.end) {
		deadline = p.end
	}
	if err := p.control.SetWriteDeadline(deadline); err != nil {
		return 0, err
	}
	return p.ResponseWriter.Write(b)
}

// text writes a part of the response.
func (d *dump) text(text string) {
	if _, err := d.buffer.WriteString(text); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// entry writes a value in JSON, indented as a member of a list or an object at the second level.
// first says that it is the first one. prefix comes before it.
func (d *dump) entry(first bool, prefix string, value []byte) {
	separator := ",\n    "
	if first {
		separator = "\n    "
	}
	d.scratch.Reset()
	if err := json.Indent(&d.scratch, value, "    ", "  "); err != nil {
		panic(http.ErrAbortHandler) // never, for the output of an encoder
	}
	d.text(separator)
	d.text(prefix)
	if _, err := d.scratch.WriteTo(d.buffer); err != nil {
		panic(http.ErrAbortHandler)
	}
}

// handleTable shows the table in the format of Istio's agent, for the scripts that read it.
// With ?collisions=1 it shows the entries that were skipped and the names that two hosts claim.
func (s *statusServer) handleTable(w *dump, r *http.Request) {
	current := s.agent.proxy.Table()
	w.Header().Set("Content-Type", "application/json")
	if current == nil {
		w.WriteHeader(http.StatusNotFound)
		w.text("{}\n")
		return
	}
	if r.URL.Query().Has("collisions") {
		w.text("{\n  \"skipped\": [")
		writeList(w, current.Skipped())
		w.text("],\n  \"collisions\": [")
		writeList(w, current.Collisions())
		w.text("]\n}\n")
		return
	}
	w.text("{\n  \"table\": {")
	first := true
	for key, info := range current.Infos {
		name, err := json.Marshal(key)
		value, infoErr := protojson.Marshal(info)
		if err != nil || infoErr != nil {
			panic(http.ErrAbortHandler) // never: all texts of a table are UTF-8
		}
		w.entry(first, string(name)+": ", value)
		first = false
	}
	w.text("\n  }\n}\n")
}

// writeList writes the elements of a list in JSON.
func writeList[T table.Skipped | table.Collision | forward.CacheEntry](w *dump, list []T) {
	for i := range list {
		value, err := json.Marshal(list[i])
		if err != nil {
			panic(http.ErrAbortHandler) // never: they are texts and numbers
		}
		w.entry(i == 0, "", value)
	}
}

// maxCacheEntries limits the entries that /debug/cache shows, and so the response to a few
// megabytes.
const maxCacheEntries = 10_000

func (s *statusServer) handleCache(w *dump, r *http.Request) {
	content, err := s.agent.proxy.CacheContent(selection(r), maxCacheEntries)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.text(fmt.Sprintf("{\n  \"total\": %d,\n  \"entries\": [", content.Total))
	writeList(w, content.Entries)
	w.text("]\n}\n")
}
