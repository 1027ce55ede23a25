package nds

import (
	"context"
	"log/slog"
	"strings"
	"time"
)

// repeatedEvery is how often a failure that goes on is logged again.
const repeatedEvery = time.Minute

// repeated logs a failure once and then counts it; the count is logged once a minute
// and when the failure changes or is over. It belongs to one goroutine.
type repeated struct {
	log *slog.Logger

	// The failure that was logged last; text is "" if there is none. count is how
	// often it came since then.
	level         slog.Level
	message, text string
	count         int
	logged        time.Time
	// recovered says that its end was logged. It may come again: until over, the two
	// of them are logged once.
	recovered bool
}

// withoutLocalPort returns the text of an error without the port that differs for each
// connection: of "10.0.0.1:41234->10.0.0.2:15012".
func withoutLocalPort(text string) string {
	before, after, found := strings.Cut(text, "->")
	if !found {
		return text
	}
	return strings.TrimRight(before, "0123456789") + "->" + after
}

// say logs a failure, or counts it if it is the one before. args are logged with it.
func (r *repeated) say(message string, level slog.Level, err error, args ...any) {
	text := withoutLocalPort(err.Error())
	if r.message == message && r.text == text && r.level == level {
		r.count++
		if time.Since(r.logged) >= repeatedEvery {
			r.flush()
		}
		return
	}
	r.over()
	r.level, r.message, r.text, r.logged, r.recovered = level, message, text, time.Now(), false
	r.log.Log(context.Background(), level, message, append([]any{"error", err}, args...)...)
}

// flush logs the count, if there is one.
func (r *repeated) flush() {
	if r.count == 0 {
		return
	}
	r.log.Log(context.Background(), r.level, r.message, "error", r.text, "repeated", r.count)
	r.count, r.logged = 0, time.Now()
}

// recover logs that what failed works again, for now.
func (r *repeated) recover(message string, args ...any) {
	if r.text == "" || r.recovered {
		return
	}
	r.recovered = true
	r.log.Info(message, append(args, "repeated", r.count)...)
	r.count = 0
}

// over ends the failure, after which it is logged again.
func (r *repeated) over() {
	r.flush()
	r.message, r.text = "", ""
}
