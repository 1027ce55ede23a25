package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/guard"
)

func newCaptureGuard() *cobra.Command {
	c := new(captureCommand)
	command := c.declared("guard", "Remove the rules if the agent does not come back", fmt.Sprintf(`Wait for the end of the agent, and remove its rules unless another agent follows within
%v. At the end of the command, remove the rules unless an agent runs. With
--capture-fail-open=false the rules stay.

This is for nametap-guard.service: systemd holds the sockets of the agent, so queries
wait in them while it restarts. The guard listens for the agent at the path in the
environment variable %s.`, guard.Patience, guard.PathEnv))
	command.RunE = func(command *cobra.Command, _ []string) error {
		path := os.Getenv(guard.PathEnv)
		if path == "" {
			return usageError{errors.New("want the path of a socket in " + guard.PathEnv)}
		}
		log := newLogWriter(os.Stderr)
		defer log.close()
		c.options.logTo = log
		failOpen, logger := c.resolveForRemoval()
		sockets, err := systemdSockets()
		if err != nil {
			logger.Error("programs of other users may take the queries of the agent", "error", err)
		}
		// back-off notes the starts of this unit beside the socket.
		forget := func() { agent.ForgetStarts(filepath.Dir(path), logger) }
		context.AfterFunc(command.Context(), forget)
		return guard.Run(command.Context(), guard.Config{
			Sockets: sockets,
			Path:    path, FailOpen: failOpen, Patience: guard.Patience, Log: logger,
			Remove: func(ctx context.Context) error {
				defer debug.FreeOSMemory() // this process stays small
				return removeAfterAgent(ctx, logger)
			},
			Listening: func() {
				debug.FreeOSMemory()
				time.AfterFunc(agent.SteadyTime, forget)
			},
		})
	}
	return command
}
