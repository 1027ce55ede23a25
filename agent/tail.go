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
	// ParamSince is how far back to begin, as a duration. Without it, only queries after the request are sent.
	ParamSince = "since"
	// ParamOnce ends the response after the past queries.
	ParamOnce = "once"
)

// tailStall is how long a client of /debug/tail may read nothing before its response ends. It is long, because there are
// few such clients, and a slow client does no harm: further queries are dropped for this client, and no other client
// waits.
const tailStall = time.Minute

// A TailLine is one line of /debug/tail: a query, or the number of queries that were lost.
type TailLine struct {
	*seen.Record
	Lost uint64 `json:"lost,omitempty"`
}

// parseSince reads a duration, such as "10m", and returns the current time minus that duration. For "" it returns the
// zero time.
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

// send writes the number of queries that were lost, unless it is 0, and then the records.
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
