package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
)

// Parameters of /debug/tail, besides the fields of a [seen.Filter].
const (
	// ParamSince is how far back to begin, as a duration. Without it, only later queries are sent.
	ParamSince = "since"
	// ParamOnce ends the response after the queries that there were.
	ParamOnce = "once"
)

// tailStall is how long a client of /debug/tail may take nothing. There are few such clients, and a client loses only
// the queries that it does not read.
const tailStall = time.Minute

// A TailLine is one line of /debug/tail: a query, or how many were lost.
type TailLine struct {
	*seen.Record
	Lost uint64 `json:"lost,omitempty"`
}

// parseSince returns the time a duration ago, the zero time for "".
func parseSince(text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	ago, err := time.ParseDuration(text)
	if err != nil || ago <= 0 {
		return time.Time{}, fmt.Errorf("since %q: want a time such as 10m", text)
	}
	return time.Now().Add(-ago), nil
}

// A tail is one response of /debug/tail.
type tail struct {
	http.ResponseWriter
	control *http.ResponseController
	encoder *json.Encoder
}

// send writes records, and how many were lost.
func (t *tail) send(records []seen.Record, lost uint64) error {
	if err := t.control.SetWriteDeadline(time.Now().Add(tailStall)); err != nil {
		return err
	}
	var errs error
	if lost > 0 {
		errs = t.encoder.Encode(TailLine{Lost: lost})
	}
	for i := range records {
		errs = errors.Join(errs, t.encoder.Encode(TailLine{Record: &records[i]}))
	}
	return errors.Join(errs, t.control.Flush())
}
