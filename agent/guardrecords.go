package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/internal/statedir"
)

// guardInterval is how often the records of the guard are saved.
const guardInterval = time.Minute

// keepGuardRecords saves the records of the guard in the state directory, once a minute and at the end. It begins with those
// of the previous agent. It calls the function saved when it has saved the records, which leaves garbage.
func keepGuardRecords(ctx context.Context, c *core, saved func()) error {
	g, path := c.config.Guard, c.config.XDS.StateDir
	if g == nil || path == "" {
		return nil
	}
	dir := statedir.New(path, "guard.lock")
	defer dir.Unlock()
	var before guard.Records
	text, err := os.ReadFile(dir.File(guard.RecordsFile))
	if err == nil {
		err = json.Unmarshal(text, &before)
	}
	if err == nil {
		g.Restore(before)
	} else if !errors.Is(err, fs.ErrNotExist) {
		c.log.Warn("the guard's records begin anew", "error", err)
	}
	due, stop := c.clock.Poll(guardInterval, func() bool { return true })
	defer stop()
	for ended := false; !ended; {
		select {
		case <-due:
		case <-ctx.Done():
			ended = true
		}
		text, err := json.Marshal(g.Records())
		if err == nil {
			err = dir.Write(guard.RecordsFile, text, []byte("\n"))
		}
		if err != nil {
			c.log.Warn("the guard's records cannot be saved: see --state-dir", "error", err)
		}
		saved()
	}
	return nil
}
