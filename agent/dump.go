package agent

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/internal/httpguard"
)

// maxDumps is how many clients get a dump at a time. A dump keeps a table alive that was replaced meanwhile.
const maxDumps = 2

// dumps are the responses that grow with the table and the cache. They are written entry by
// entry, so that their memory does not grow with them.
type dumps struct{ *httpguard.Dumps }

func newDumps() dumps { return dumps{httpguard.NewDumps(maxDumps, "the table or the cache")} }

// limited returns a handler that refuses a request while maxDumps others are answered.
func (d dumps) limited(next func(w *dump, r *http.Request)) http.HandlerFunc {
	return d.Limited(func(w *httpguard.Dump, r *http.Request) { next(&dump{Dump: w}, r) })
}

// A dump is one response.
type dump struct {
	*httpguard.Dump
	scratch bytes.Buffer // of entry
}

// text writes a part of the response.
func (d *dump) text(text string) { _, _ = io.WriteString(d, text) } // it panics instead of an error

// entry writes a value in JSON, indented as a member of a list or an object at the second level.
// first is set for the first member. prefix comes before the value.
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
	_, _ = d.scratch.WriteTo(d) // it panics instead of an error
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
