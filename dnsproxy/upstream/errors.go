package upstream

import (
	"errors"
	"strings"
)

// A noReply is the error of a query that no server answered. Its text may be sent to clients,
// so it is one short line.
type noReply struct {
	text   string
	causes []error
}

// strays follows the cause of a server that has sent something.
const strays = ", only packets that are no reply to a query in flight"

// newNoReply returns the error of an exchange that is over, with the cause for each server.
func newNoReply(e *exchange) *noReply {
	var text strings.Builder
	text.WriteString("no nameserver answered")
	separator := ": "
	err := &noReply{}
	for i := range e.servers {
		cause := e.schedule.tries[i].err
		if cause == nil {
			cause = e.schedule.cause
		}
		if cause == nil {
			continue
		}
		text.WriteString(separator)
		text.WriteString(e.servers[i].name + ": " + cause.Error())
		if t := &e.schedule.tries[i]; t.asked > 0 && errors.Is(cause, ErrTimeout) && e.servers[i].strayedSince(t.first) {
			text.WriteString(strays)
		}
		separator = "; "
		err.causes = append(err.causes, cause)
	}
	err.text = text.String()
	return err
}

// Error returns a text with every server and its cause.
func (e *noReply) Error() string { return e.text }

// Unwrap returns the causes.
func (e *noReply) Unwrap() []error { return e.causes }
