package upstream

import (
	"strings"
)

// A noReply says why no server answered. Its text may go to clients, so it is one
// short line.
type noReply struct {
	text   string
	causes []error
}

// newNoReply collects the causes of all servers; cause is that of the servers that
// were still awaited.
func newNoReply(tries []try, cause error) *noReply {
	var text strings.Builder
	text.WriteString("no nameserver answered")
	separator := ": "
	err := &noReply{}
	for i := range tries {
		why := tries[i].err
		if why == nil {
			why = cause
		}
		if why == nil {
			continue
		}
		text.WriteString(separator)
		text.WriteString(tries[i].server.spec.String() + ": " + why.Error())
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
