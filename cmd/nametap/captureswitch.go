package main

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/settings"
)

// switchReader returns a function that reads the switch again, with all other settings.
func (o *options) switchReader() func() (agent.Switch, error) {
	return func() (agent.Switch, error) {
		again := newOptions(pflag.NewFlagSet("", pflag.ContinueOnError))
		if err := settings.CopyGiven(again.flags, o.flags); err != nil {
			return agent.Switch{}, err
		}
		if err := again.resolve(); err != nil {
			return agent.Switch{}, err
		}
		return again.captureSwitch(), nil
	}
}

// captureSwitch returns whether DNS is to be captured, and which setting says so.
func (o *options) captureSwitch() agent.Switch {
	flag := o.flags.Lookup(enabledFlag)
	because := fmt.Sprintf("%s is %s by %s", settings.Env(flag), flag.Value, settings.Source(flag))
	return agent.Switch{On: o.captureEnabled, Because: because}
}
