package upstream

import (
	"strings"
)

// A noReply is the error of a query that no server answered. Its text may be sent to clients,
// so it is one short line.
type noReply struct {
	text   string
	causes []error
}

// newNoReply collects the causes of all servers of an exchange that is over.
func newNoReply(e *exchange) *noReply {
	var text strings.Builder
	text.WriteString("no nameserver answered")
	separator := ": "
	err := &noReply{}
	for i := range e.servers {
		why := e.schedule.tries[i].err
		if why == nil {
			why = e.schedule.cause
		}
		if why == nil {
			continue
		}
		text.WriteString(separator)
		text.WriteString(e.servers[i].spec.String() + ": " + why.Error())
		separator = "; "
		err.causes = append(err.causes, why)
	}
	err.text = text.String()
	return err
}

// Error names every server with its cause.
func (e *noReply) Error() string { return e.text }

// Unwrap returns the causes.
func (e *noReply) Unwrap() []error { return e.causes }
